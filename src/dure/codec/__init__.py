"""What goes on the wire?

| name      | class      | a message holds                                             | members' messages become      |
|-----------|------------|-------------------------------------------------------------|-------------------------------|
| `fp32`    | `Float32`  | every element, as it is: 4 bytes each                       | their mean                    |
| `fp16`    | `Float16`  | every element in half precision: 2 bytes each               | their mean                    |
| `bf16`    | `BFloat16` | the upper half of every float32: 2 bytes each               | their mean                    |
| `int8`    | `Int8`     | 8 bits each, a scale for 256                                | their mean                    |
| `1bit`    | `OneBit`   | a bit each, two means per column                            | their mean                    |
| `strom`   | `Strom`    | positions and signs of what has grown beyond a threshold    | their mean                    |
| `top-k`   | `TopK`     | positions and values of the largest                         | their mean                    |
| `sign`    | `Sign`     | a bit each                                                  | a majority, or their mean     |
| `ternary` | `Ternary`  | -1, 0 or 1                                                  | a majority; a zero abstains   |
| `it-sign` | `ITSign`   | as `ternary`, or `sign`                                     | a vote weighted by reliance   |
| `ef` | `ErrorFeedback` | joined by `+`: what is lost is added to what comes next     | their mean                    |
| `momentum` | `Momentum` | joined by `+`: a moving average is encoded                 | what the codec's do           |

`base` says what a codec is, `coder` what it is made of, `exchange` how messages of several members become one,
`vote` how signs do, `residual` what coders keep; `bits` and `gaps` pack, in `blocks`.
"""

from dure.core.catalogue import Entry

__all__ = ["CATALOGUE", "WRAPPERS"]

CATALOGUE = {
    "fp32": Entry(
        "dure.codec.fp32",
        "Float32",
        "every element as it is, 4 bytes each",
        "IEEE Standard for Floating-Point Arithmetic, IEEE 754-2019",
    ),
    "fp16": Entry(
        "dure.codec.floats",
        "Float16",
        "every element in half precision, 2 bytes each",
        "Micikevicius et al., Mixed Precision Training, ICLR 2018",
    ),
    "bf16": Entry(
        "dure.codec.floats",
        "BFloat16",
        "the upper half of every float32, 2 bytes each",
        "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
    ),
    "int8": Entry(
        "dure.codec.floats",
        "Int8",
        "8 bits each, and a scale for every 256",
        "Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016",
    ),
    "1bit": Entry(
        "dure.codec.one_bit",
        "OneBit",
        "a bit each, and two means per column; the error is fed back",
        "Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent, Interspeech 2014",
    ),
    "strom": Entry(
        "dure.codec.strom",
        "Strom",
        "position and sign of what has grown beyond a threshold; the rest waits",
        "Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015",
    ),
    "top-k": Entry(
        "dure.codec.top_k",
        "TopK",
        "position and value of the largest; the rest waits",
        "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017",
    ),
    "sign": Entry(
        "dure.codec.sign",
        "Sign",
        "a bit each, put to a majority vote",
        "Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019",
    ),
    "ternary": Entry(
        "dure.codec.ternary",
        "Ternary",
        "signs in which a zero abstains, put to a majority vote",
        "Wen et al., TernGrad, NeurIPS 2017 (the alphabet); Bernstein et al. 2019 (the vote)",
    ),
    "it-sign": Entry(
        "dure.codec.it_sign",
        "ITSign",
        "signs, put to a vote weighted by how reliable each worker has been",
        "Park, Poor and Lee, SignSGD with Federated Voting, 2024, arXiv 2403.16372",
    ),
}

WRAPPERS = {
    "ef": Entry(
        "dure.codec.feedback",
        "ErrorFeedback",
        "what a codec loses is added to what comes next",
        "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018",
        combines=("fp16", "bf16", "int8", "sign"),
    ),
    "momentum": Entry(
        "dure.codec.feedback",
        "Momentum",
        "a moving average is encoded; with signs, Signum",
        "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018",
        combines=("sign", "ternary", "it-sign"),
    ),
}
"""What joins a codec by `+`, as in `sign:scaled=true+ef`."""
