"""What the run trains: parameters, statistics, scheduler, and how they are captured, restored and averaged."""
