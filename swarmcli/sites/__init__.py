"""Sites: several processes on a fast network that are one peer of a swarm."""
