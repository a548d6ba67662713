"""The energy server: jobs, profiles and clocks over Zeus's protocol."""
