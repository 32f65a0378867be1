"""Torch's side: the only room that knows autograd and nn.Module."""
