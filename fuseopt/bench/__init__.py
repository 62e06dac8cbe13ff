"""What is measured, and with what: timer, machine, result records, and the demo. The package never needs it."""
