"""Where a step goes: `train --profile`."""
