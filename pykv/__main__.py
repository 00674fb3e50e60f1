"""`python -m pykv` is `pykv`."""

from pykv.cli._start import main

raise SystemExit(main())
