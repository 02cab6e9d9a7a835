"""What goes on the wire: tensors made smaller, and the mean of a group through that."""
