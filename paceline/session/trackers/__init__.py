"""Where the first worker reports a run to, beside its folder: TensorBoard, Weights & Biases, MLflow, Prometheus."""
