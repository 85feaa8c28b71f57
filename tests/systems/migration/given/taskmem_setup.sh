git clone https://github.com/Hope-Rita/TaskMem-PhaseOne.git
cd TaskMem-PhaseOne
bash bootstrap.sh
cp configs/api_config.example.json configs/api_config.json
# then edit configs/api_config.json
export M3_API_CONFIG=/path/to/your/api_config.json
