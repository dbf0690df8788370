"""How a group averages: parts, reducers, time limits, and how it goes on when a member is lost in the middle."""
