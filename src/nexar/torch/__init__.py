"""The torch.distributed backend "nexar"."""
