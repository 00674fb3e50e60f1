"""`python -m pykv` is `pykv`."""

from pykv.cli.app import main

raise SystemExit(main())
