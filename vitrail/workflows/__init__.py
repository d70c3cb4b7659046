"""Jobs that several commands share: resolve settings, keep a run folder, train, measure."""
