"""The averages of past rounds: kept, served, and fetched by peers that missed them."""
