"""What a person starts: the `longpitch` command, the training loop, and the scripts around them."""
