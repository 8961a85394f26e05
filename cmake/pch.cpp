// The precompiled header lives in an object library of its own; see cram_targets.cmake.
