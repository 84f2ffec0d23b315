"""``python -m thinfer``, the same as the ``thinfer`` command."""

from thinfer.cli.main import main

main()
