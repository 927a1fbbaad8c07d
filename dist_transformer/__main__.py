"""`python -m dist_transformer` is the command `dist-transformer`."""

from dist_transformer.cli.main import main

if __name__ == "__main__":
    main()
