"""What a run says of itself: records, log lines, the machines' load and MFU."""
