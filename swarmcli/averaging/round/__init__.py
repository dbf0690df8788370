"""How a group averages: parts, reducers, patience, and how it goes on when a member is lost in the middle."""
