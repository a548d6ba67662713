"""Questions about energy that need several rooms: profiles, frontiers, clocks."""
