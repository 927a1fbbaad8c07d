"""Pictures and pages about runs, made from what stands in their folders and from arrays; without torch."""
