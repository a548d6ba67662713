"""What the energy server decides, without the server: events in, clocks of ranks out."""
