"""What the run trains: parameters, statistics, scheduler and lineage; how they are captured, restored and averaged."""
