"""Never imports torch."""

import sys

from truth import Truth

print("torch" in sys.modules, sys.argv[1:], __file__.rsplit("/", 1)[1], __name__)
Truth().finish()
