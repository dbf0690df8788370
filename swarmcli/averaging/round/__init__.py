"""How a group averages: parts, reducers, patience, and what happens when somebody is lost in the middle."""
