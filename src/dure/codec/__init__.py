"""The codec axis: the encodings of messages. One line per member; its class states the rest (`core.catalogue`).

A wrapper joins a codec by `+`, as in `sign:scaled=true+ef`.

    base        `Codec`, the interface of a member; `Vote`
    coder       `Coder`, which encodes and decodes one slice; `SliceLayout`; the coders of casts and of wrappers
    exchange    the rounds in which the messages of all members become one message
    vote        majority and weighted votes on signs
    bits, gaps  packing of bits, and of positions
    blocks      block-wise work that stays in the cache
    cost        the cost of a codec in virtual time, and its measurement
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
    "it-sign": "dure.codec.sign:ITSign",
}

WRAPPERS = {
    "ef": "dure.codec.feedback:ErrorFeedback",
    "momentum": "dure.codec.feedback:Momentum",
}
