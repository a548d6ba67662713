"""Plans rehearsed without their devices: compute slept through, links slowed down."""
