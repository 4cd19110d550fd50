"""Attached models inside trainers of others. Each module imports its framework, and dure needs none of them.

| module         | framework                | a user writes                                                      |
|----------------|--------------------------|--------------------------------------------------------------------|
| `lightning`    | Lightning                | `Trainer(strategy=DureStrategy(sync=...))`                         |
| `transformers` | Hugging Face Trainer     | `DureTrainer(..., sync=...)`                                       |
| `accelerate`   | Accelerate               | `attach(accelerator, model, optimizer, sync=...)` after `prepare`  |
| `ray_train`    | Ray Train                | `attach(model, optimizer, sync=...)` in place of `prepare_model`   |
| `rank_files`   | all                      | the state of each rank inside a framework's checkpoint             |
"""
