"""Pages and pictures from results. matplotlib is imported when something is drawn."""
