"""A loop of TensorFlow with `tf.GradientTape`, for one worker or several, by Horovod's calls.

Run it with `python examples/bridges/tensorflow_tape.py`, or with
`paceline run --workers 2 examples/bridges/tensorflow_tape.py`. It learns whether a point is inside
of a circle. A step has 60 samples, which are divided among the workers, so that losses are the same
for one, two or three of them.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf

import paceline.bridges.horovod.tensorflow as hvd

hvd.init()
share = 60 // hvd.size()  # samples of this worker in each step
keras.utils.set_random_seed(0)  # all workers make the same data and the same model
points = tf.random.uniform([1200, 2], -1, 1)
inside = tf.cast(tf.norm(points, axis=1) < 0.8, tf.float32)
# The whole batches of all workers, and this worker's part of each one.
batches = tf.data.Dataset.from_tensor_slices((points, inside)).batch(60, drop_remainder=True)
parts = batches.map(lambda x, y: (x[hvd.rank() * share :][:share], y[hvd.rank() * share :][:share]))
model = keras.Sequential(
    [keras.Input((2,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
)
optimizer = keras.optimizers.Adam(1e-2)
optimizer.build(model.trainable_variables)
hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
measure = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def train(x, y):
    with tf.GradientTape() as tape:
        loss = measure(y[:, tf.newaxis], model(x, training=True))
    tape = hvd.DistributedGradientTape(tape)  # its gradients are means over all workers
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return hvd.allreduce(loss)


for epoch in range(3):
    losses = [float(train(x, y)) for x, y in parts]
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.5f}")
hvd.shutdown()
