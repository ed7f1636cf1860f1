"""Shows records: console tables and experiment tracking. It measures nothing."""
