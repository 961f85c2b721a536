"""What `longpitch bench` measures: our attention, a whole training step, and preparing data, each beside its peers."""
