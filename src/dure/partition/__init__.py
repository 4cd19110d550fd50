"""The partition axis: the split of the model. One line per member; the class describes the rest (`core.catalogue`)."""

__all__ = ["CATALOGUE", "PIPELINES", "SHARDED", "SHARING"]

PIPELINES = {
    "gpipe": "dure.partition.methods.gpipe:GPipe",
    "1f1b": "dure.partition.methods.one_f_one_b:OneFOneB",
    "interleaved": "dure.partition.methods.interleaved:Interleaved",
    "zero-bubble": "dure.partition.methods.zero_bubble:ZeroBubble",
    "pipedream": "dure.partition.methods.pipedream:PipeDream",
    "pipedream-2bw": "dure.partition.methods.pipedream_2bw:PipeDream2BW",
    "petrowski": "dure.partition.methods.petrowski:Petrowski",
    "chen": "dure.partition.methods.chen:Chen",
    "spectrain": "dure.partition.methods.spectrain:SpecTrain",
    "multi-version": "dure.partition.methods.multi_version:MultiVersion",
    "ddg": "dure.partition.methods.ddg:DDG",
    "features-replay": "dure.partition.methods.features_replay:FeaturesReplay",
    "dni": "dure.partition.methods.dni:DNI",
}
"""Partitions by layers."""

SHARING = {
    "one-weird-trick": "dure.partition.methods.one_weird_trick:OneWeirdTrick",
    "tensor": "dure.partition.methods.tensor:TensorParallel",
    "neurons": "dure.partition.methods.neurons:Neurons",
}
"""Partitions inside layers."""

SHARDED = {"zero": "dure.partition.methods.zero:Zero"}
"""Partitions of what data-parallel workers would hold alike."""

CATALOGUE = {"none": "dure.partition.whole:Whole", **PIPELINES, **SHARING, **SHARDED}
