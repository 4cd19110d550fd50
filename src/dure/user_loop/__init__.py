"""Implementation of `dure.attach` and `dure.hook`: methods and codecs in a training loop that the user owns.

| file             | subject                                                                                |
|------------------|----------------------------------------------------------------------------------------|
| `attach`         | checks of a model and a strategy, and the parts of an attached model                   |
| `attached`       | steps, evaluation and end of an attached model                                         |
| `lifetime`       | the state of its training: running, ended or failed; closes all connections            |
| `gradient_check` | skips steps whose gradients hold NaN or infinity                                       |
| `source`         | gradients that the user's `backward()` leaves; the method waits here between two steps |
| `exchange`       | the mean gradient of all ranks, exchanged during `backward()`                          |
| `optimizer`      | the user's optimizer at this rank, and its rule for servers                            |
| `peers`          | the other ranks over collectives: a common start and a common end                      |
| `servers`        | helper processes that hold the model, and the calls to them                            |
| `host`           | the process of one such server                                                         |
| `sampler`        | this rank's share of a data set                                                        |
| `wrapped`        | refuses models that a wrapper synchronizes                                             |
| `ddp_hook`       | codecs as a communication hook of DistributedDataParallel                              |
"""
