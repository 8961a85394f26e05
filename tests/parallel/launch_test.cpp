// Who a process is, from the variables of its launcher.
#include "parallel/launch.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

namespace cram {
namespace {

// The environment of this test, without any launcher's variables but the given ones.
Launch launch_with(const std::map<std::string, std::string>& variables) {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
        "SLURM_NTASKS", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}) {
    unsetenv(name);
  }
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  return detect_launch();
}

void expect(const Launch& launch, const char* launcher, int rank, int world, int local_rank, int local_size) {
  EXPECT_EQ(launch.launcher, launcher);
  EXPECT_EQ(launch.rank, rank);
  EXPECT_EQ(launch.world_size, world);
  EXPECT_EQ(launch.local_rank, local_rank);
  EXPECT_EQ(launch.local_size, local_size);
}

TEST(Launch, IsReadFromTheLaunchersVariables) {
  expect(launch_with({}), "none", 0, 1, 0, 1);
  expect(launch_with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}), "none", 0, 1, 0, 1);  // a batch script
  const std::map<std::string, std::string> mpirun = {{"OMPI_COMM_WORLD_SIZE", "8"},
                                                     {"OMPI_COMM_WORLD_RANK", "5"},
                                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  expect(launch_with(mpirun), "mpirun", 5, 8, 1, 4);
  std::map<std::string, std::string> srun = {{"SLURM_STEP_NUM_TASKS", "11"},
                                             {"SLURM_PROCID", "9"},
                                             {"SLURM_LOCALID", "1"},
                                             {"SLURM_NODEID", "2"},
                                             {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"}};
  expect(launch_with(srun), "srun", 9, 11, 1, 3);
  srun["SLURM_NODEID"] = "1";
  expect(launch_with(srun), "srun", 9, 11, 1, 4);
  // mpirun starts its daemons with srun: its own word counts.
  srun.insert(mpirun.begin(), mpirun.end());
  expect(launch_with(srun), "mpirun", 5, 8, 1, 4);
  expect(launch_with({{"PMI_SIZE", "3"}, {"PMI_RANK", "2"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}}), "PMI",
         2, 3, 2, 3);
}

}  // namespace
}  // namespace cram
