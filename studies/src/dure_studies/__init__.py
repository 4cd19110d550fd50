"""Reproduces tables and figures of papers: the published figures beside those of this library.

| name         | module       | from                                                                           |
|--------------|--------------|--------------------------------------------------------------------------------|
| `sharding`   | `sharding`   | a comparison of layer-based and memory-based parameter sharding on VGG-16      |
| `it-signsgd` | `it_signsgd` | Park and Lee: a weighted vote on the signs of workers with unequal batches     |
| `byzantine`  | `byzantine`  | Bernstein et al.: a majority vote on signs, some of which are false            |
| `pipelines`  | `pipelines`  | a survey: the damage of stale weights to learning, by the number of stages     |
| `bert-albert` | `bert_albert`, `bert_albert_methods` | a comparison of data and tensor parallelism on BERT, ALBERT |
| `one-weird-trick` | `one_weird_trick` | Krizhevsky: convolutions data-parallel, dense layers model-parallel  |
| `asynchronous` | `asynchronous` | Dean et al., Chen et al.: asynchronous SGD, backup workers and synchronous SGD |
| `elastic` | `elastic` | Zhang et al.: elastic averaging and Downpour SGD by the steps between exchanges |
| `version-skew` | `version_skew` | Yook et al.: models from several servers, whose parts have different versions |
| `averaging` | `averaging` | Zinkevich et al., Su et al., Chen and Huo: periods and weights of averages of models |
| `delay-compensation` | `delay_compensation` | Zheng et al.: DC-ASGD, Downpour and BSP by the number of workers |
| `gossip` | `gossip` | Lian et al.: AD-PSGD, BSP and Downpour by the strength of a slow worker |
| `momentum` | `momentum` | Mitliagkas et al.: the momentum that asynchrony adds, and its compensation |
| `batch-size` | `batch_size` | Yook et al.: sizes of mini-batches at equal samples |
| `shared-memory` | `shared_memory` | Niu et al., Sallinen et al., Zhao and Li: one model in shared memory |
| `k-methods` | `k_methods` | Dutta et al.: seconds of an update and loss by K, beside closed forms |
| `neurons` | `neurons` | Dean et al.: words and seconds of assignments of units to machines |
| `collectives` | `collectives` | a survey: seconds of an all-reduce by algorithm, size and latency |
| `strom` | `strom` | Strom: bytes and accuracy by the threshold of his codec |
| `hybrid` | `hybrid` | a survey: collectives, servers and the hybrid, for a sparse and a dense model |
| `ssp` | `ssp` | Ho et al.: waiting, lead and accuracy by the bound of SSP |
| `hogwild` | `hogwild` | Niu et al.: conflicts of updates without locks, and the seconds of locks |
| `structures` | `structures` | a survey: seconds of a step over collectives and over servers, for several models |
| `reinforcement` | `reinforcement` | a survey: DQN, Gorila and Ape-X at equal time; Horgan et al.: more actors |
| `stale-gradients` | `stale_gradients` | a survey: samples to an accuracy by the number of asynchronous workers |
| `table1` | `table1` | Yook et al.: operations and words of synchronous, asynchronous and pipelined SGD |

`papers` lists the sections, figures, tables and claims of the papers, with the commands that show them. `every` runs
them all. A `study` compares settings over several seeds.

`dure reproduce` finds the modules by the entry points of this distribution; `dure.cli.reproduce` says what they have.
"""
