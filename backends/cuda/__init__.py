"""The CUDA back end: a plug-in execution provider of ours that the stock onnxruntime wheel loads."""
