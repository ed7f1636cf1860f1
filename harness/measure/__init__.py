"""What a run cost and whether two costs differ. Only `clock` reads the time; only `environment` runs other programs."""
