"""What goes on the wire? One line per member; the class describes the rest (`core.catalogue`).

`WRAPPERS` join a codec by `+`, as in `sign:scaled=true+ef`.

`base` says what a codec is, `coder` what it is made of, `exchange` how messages of several members become one,
`vote` how signs do, `residual` what coders keep; `bits` and `gaps` pack, in `blocks`.
"""

__all__ = ["CATALOGUE", "WRAPPERS"]

CATALOGUE = {
    "fp32": "dure.codec.fp32:Float32",
    "fp16": "dure.codec.floats:Float16",
    "bf16": "dure.codec.floats:BFloat16",
    "int8": "dure.codec.floats:Int8",
    "1bit": "dure.codec.one_bit:OneBit",
    "strom": "dure.codec.strom:Strom",
    "top-k": "dure.codec.top_k:TopK",
    "sign": "dure.codec.sign:Sign",
    "ternary": "dure.codec.ternary:Ternary",
    "it-sign": "dure.codec.it_sign:ITSign",
}

WRAPPERS = {
    "ef": "dure.codec.feedback:ErrorFeedback",
    "momentum": "dure.codec.feedback:Momentum",
}
