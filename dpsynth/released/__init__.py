"""Post-processing: reads released and public artifacts only."""
