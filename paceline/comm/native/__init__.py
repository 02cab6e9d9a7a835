"""Groups on torch.distributed: Gloo and NCCL."""
