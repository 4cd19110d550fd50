"""Jobs for dure on published data sets: small models, with settings that measurements have shown to learn.

    | job                  | data         | model, with parameters of the job and their defaults                      |
    |----------------------|--------------|----------------------------------------------------------------------------|
    | `digits-local`       | 8x8 digits   | `depth=2` locally connected layers of `channels=4`, `kernel=3`: local.py   |
    | `mnist-mlp`          | MNIST        | `depth=1` hidden layers of `hidden=32` units: mnist.py                     |
    | `mnist-cnn`          | MNIST        | two convolutions, no batch norm: mnist.py                                  |
    | `cifar10-cnn`        | CIFAR-10     | three convolutions with batch norm: cifar10.py                             |
    | `cifar10-vgg16`      | CIFAR-10     | VGG-16 with `width=0.25` of its channels; `size=32`, `classes=10`: vgg16.py|
    | `embedding-text`     | IMDB reviews | mean of words' embeddings, two dense layers; sparse gradients: text.py     |
    | `imdb-bert`          | IMDB reviews | Hugging Face's BERT of `layers=2`, `hidden=64`, `heads=4`: transformers.py |
    | `imdb-albert`        | IMDB reviews | Hugging Face's ALBERT, likewise                                            |
    | `softmax-regression` | drawn        | linear, convex with a finite optimum: softmax.py                           |

dure finds them by the entry points of this distribution. `transformers.base_shapes` is a job with shapes but no values,
for runs in virtual time without gradients.
"""
