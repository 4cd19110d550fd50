"""What stands behind `dure.attach`: a method of `sync/`, driven from a loop that the user owns.

| file | what |
|---|---|
| `source` | gradients that the user's `backward()` leaves: where the method stands between two steps |
| `optimizer` | the user's optimizer: as it is at this rank, as plain rules for servers |
| `peers` | the other ranks over collectives: the same start, the same end |
| `servers` | the helper processes that hold the model, and what they are asked |
| `sampler` | a data set's share of this rank, epoch after epoch |
"""
