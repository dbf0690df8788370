"""A run's state: parameters, statistics, scheduler and lineage; how they are captured, restored and averaged."""
