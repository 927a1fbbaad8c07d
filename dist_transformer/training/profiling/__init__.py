"""Profile of a step by its parts: `train --profile`."""
