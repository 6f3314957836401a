"""``python -m dsv4convert``: the same as the ``dsv4convert`` command."""

from dsv4convert.cli import main

if __name__ == "__main__":
    main(prog_name="dsv4convert")
