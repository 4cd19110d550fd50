"""What goes on the wire?

| name   | class     | a message holds                        |
|--------|-----------|----------------------------------------|
| `fp32` | `Float32` | every element, as it is: 4 bytes each  |
"""

from dure.catalogue import Entry

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "fp32": Entry(
        "dure.codec.fp32",
        "Float32",
        "every element as it is, 4 bytes each",
        "IEEE Standard for Floating-Point Arithmetic, IEEE 754-2019",
    ),
}
