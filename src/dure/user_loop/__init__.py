"""Implementation of `dure.attach` and `dure.hook`: methods and codecs in a training loop that the user owns.

| file             | subject                                                                                |
|------------------|----------------------------------------------------------------------------------------|
| `attach`         | checks of a model and a strategy, and the parts of an attached model                   |
| `attached`       | steps, evaluation and end of an attached model; closes all connections                 |
| `checks`         | refuses wrapped models, skips faulty gradients, finds changes of a model in place      |
| `source`         | this rank's samples, the gradients that `backward()` leaves, and their exchange        |
| `optimizer`      | the user's optimizer at this rank, and its rule for servers                            |
| `peers`          | the other ranks over collectives: a common start and a common end                      |
| `gossip`         | averagings with neighbors, inside the calls of the loop                                |
| `servers`        | helper processes that hold the model, and the calls to them                            |
| `ddp_hook`       | codecs as a communication hook of DistributedDataParallel                              |
"""
