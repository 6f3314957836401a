"""``python -m dsv4convert``: the same as the ``dsv4convert`` command."""

import sys

# Worker processes import this module under another name; they need none of it.
if __name__ == "__main__":
    try:
        from dsv4convert.cli import main

        main(prog_name="dsv4convert")
    except KeyboardInterrupt:
        # Before a command has begun there is nothing to say.
        sys.exit(130)
