"""``python -m attnlens`` is the ``attnlens`` command."""

from attnlens.cli import main

main()
