"""Lets torchrun start the `longpitch` command: `torchrun ... -m launch train RECIPE`."""

from launch.cli import main

if __name__ == "__main__":
    main()
