"""`python -m cute_ep.integrations.deep_ep` prints the folder in which `import deep_ep` finds the adapter."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.stdout.write(f"{Path(__file__).parent / 'shims'}\n")
