cram_add_program(cram_data SOURCES cram_data.cpp DEPENDS cram_data cram_base)
