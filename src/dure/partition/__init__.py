"""How is the model split? One line per member; the class describes the rest (`core.catalogue`)."""

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "none": "dure.partition.whole:Whole",
}
